"""Code shared by the rooms: arguments of launches, tuned tiles, headers and helpers of each backend."""
