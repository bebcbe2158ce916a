"""Topics by mini-batches: descent on W and H, and the mutual information between documents and their weights."""
