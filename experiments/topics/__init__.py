"""Tables and figures of the FedNMF+MI paper (Si et al., 2022)."""
