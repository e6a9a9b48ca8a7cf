"""What the engines of a pool share through Redis: rate limits, and who got how much service."""
