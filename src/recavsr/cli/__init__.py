"""The command line: `recavsr upscale`, `demo`, `doctor`, `models`, `route`."""
