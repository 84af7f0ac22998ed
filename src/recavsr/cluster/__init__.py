"""Batches over a Ray cluster: many files, and the shots of long ones, on several processes or machines."""
