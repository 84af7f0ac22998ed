"""The networks, their presets and their weights."""
