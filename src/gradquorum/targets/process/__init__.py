"""The process target: rounds of one server, used by the processes of one machine."""
