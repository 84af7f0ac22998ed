"""Measuring: metrics, the held-out protocol, peers and reports."""
