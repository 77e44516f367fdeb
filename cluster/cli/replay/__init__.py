"""`tandem replay`: a recording of a group again, and its plans computed by ranks."""
