"""The control plane: compiles custom resources to one policy per pool and reports conditions."""
