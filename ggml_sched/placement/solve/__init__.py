"""Solves a chain: the cheapest pattern for each stage within the budgets, and a bound that proves how good it is."""
