"""A local cluster for development: real control plane, process kubelet, service proxy.

Not for production. Nothing here knows Tidegate's own resources or programs: what runs in the pods
comes in as a table of images.
"""
