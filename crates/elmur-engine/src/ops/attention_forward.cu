// Rows staged in shared memory, or read from global memory.
ATTENTION(attention, true)
ATTENTION(attention_in_place, false)
