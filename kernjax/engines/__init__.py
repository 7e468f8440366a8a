"""Producers of distributions that are not our own model."""
