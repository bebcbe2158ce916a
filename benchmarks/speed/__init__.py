"""Seconds to an explained variance, against scikit-learn and other libraries."""
