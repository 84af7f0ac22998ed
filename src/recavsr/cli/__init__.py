"""The command line: `recavsr upscale`, `demo`, `evaluate`, `doctor`, `models`, `route`."""
