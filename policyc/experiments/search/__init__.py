"""Finds the policy with the least damage at a given speed: scores, solver, rules, frontier."""
