"""Ratios against peers and physical limits of the same run; see README.md beside this file."""
