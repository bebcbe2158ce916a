"""Model to numbers and pictures: metrics, findings, and the report page."""
