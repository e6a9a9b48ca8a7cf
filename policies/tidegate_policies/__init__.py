"""What operator and engine agree on: policy snapshots, the wire format, and the decision rules."""
