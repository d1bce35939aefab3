/* segment_attention_cpu.c - attention within segments on CPU. */
#include "ops/segment_attention/segment_attention.h"
