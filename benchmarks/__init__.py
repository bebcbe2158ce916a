"""Benchmarks: speed, memory, federations over Flower, and the grids that defaults are chosen from.

python -m benchmarks --help
"""
