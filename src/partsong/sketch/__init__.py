"""Random sketches S with E[S Sᵀ] = I, equal at every party with the same seed."""
