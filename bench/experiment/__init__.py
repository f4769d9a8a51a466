"""Experiments: a plan in, servers started, loads run in turn, one folder with results.json, report.md, report.html and plots out."""
