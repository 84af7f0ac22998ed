"""Streaming: blocks, sessions, and the job from file to file."""
