"""Builders and fixtures shared by the tests: name only what the test is about."""
