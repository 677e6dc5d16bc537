"""The only place where domain types meet protobuf: one file per boundary."""
