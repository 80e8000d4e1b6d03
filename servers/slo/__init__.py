"""Objectives: bounds as people write them, and what is made best."""
