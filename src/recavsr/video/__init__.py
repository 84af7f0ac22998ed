"""Video in and out: the only floor that touches PyAV."""
