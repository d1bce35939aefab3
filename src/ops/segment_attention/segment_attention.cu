/* segment_attention.cu - attention within segments. Bytes: none, for its kernels are not there yet. */
