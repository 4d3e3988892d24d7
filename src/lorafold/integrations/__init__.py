"""Where lorafold meets other libraries, one file or folder each."""
