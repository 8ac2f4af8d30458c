# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
cdef void* take_memory(size_t nbytes, size_t* got) noexcept nogil
cdef void give_memory(void* memory, size_t nbytes) noexcept nogil
cdef void drop_spares() noexcept nogil
