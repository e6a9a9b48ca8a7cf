"""The control plane: watches custom resources, compiles them to one policy per pool, reports conditions."""
