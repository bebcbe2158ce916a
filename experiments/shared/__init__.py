"""Shared by the experiments: data sets, generated data, federations, metrics, tables and figures."""
