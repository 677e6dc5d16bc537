"""Results of a benchmark run as JSON, tables and charts."""
