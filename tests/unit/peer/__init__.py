"""Tests of how another project's tests are chosen."""
