"""A local cluster for development: real control plane, process kubelet, service proxy. Not for production."""
