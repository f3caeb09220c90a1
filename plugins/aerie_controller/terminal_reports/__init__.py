"""Aerie's reports as parts for a terminal, a module a report; ``terminal`` beside this prints them.

experiment (a verdict), calibration, profile, nccl_search, preflight, provisioning (a fleet), and
upkeep (what is patched, and what a prune frees).
"""
