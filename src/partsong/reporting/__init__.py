"""HTML reports: run and comparison reports, topic pages, attack findings."""
