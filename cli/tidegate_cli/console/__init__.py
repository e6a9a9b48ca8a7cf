"""The console: a live page on pools, tenants and requests, which changes nothing.

`views`, `cells`, `history` and `charts` are pure: what is shown, from what is known. `watch` reads
API server and Redis, `pages` puts it on NiceGUI, `gate` lets in who may see it, `server` runs all.
"""
