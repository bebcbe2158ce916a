"""Benchmarks: seconds to a given explained variance, the product floor, memory, compile time, tuning.

python -m benchmarks --help
"""
