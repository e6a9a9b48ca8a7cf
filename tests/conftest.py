"""Fixtures of every test."""

pytest_plugins = ["tidegate_testing.cluster"]
