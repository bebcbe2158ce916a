"""What a party computes alone: normal equations, update rules, and the alternation of both factors."""
