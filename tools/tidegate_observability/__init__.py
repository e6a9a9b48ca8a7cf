"""Dashboards and the metrics reference, generated; development only, no part of the product."""
