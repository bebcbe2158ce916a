"""Engines: run parties and server in one process, over MPI or over torch.distributed. Engines know nothing of NMF."""
