"""Random S with E[S Sᵀ] = I that make a problem smaller, the same at every party from one integer."""
