"""What the rooms share: arguments of launches, tuned tiles, headers and helpers of each backend."""
