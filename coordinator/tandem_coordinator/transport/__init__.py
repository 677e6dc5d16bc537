"""One draft or target service as the coordinator sees it: clients and sequence streams."""
