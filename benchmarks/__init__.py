"""What the docs' tables were measured with; on a quiet machine: python -m benchmarks.NAME"""
