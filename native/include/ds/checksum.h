// CRC-32 of bytes, alone or of bytes that are copied on the way: the copy then costs no second pass over the memory.
//
// The polynomial and the conditioning are zlib's (ISO 3309, reflected 0xEDB88320), so that any program can check a file.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ds {

// How the bytes are folded: eight table look-ups a word, or carry-less products of 128 or 512 bits.
enum class CrcLevel : int { table = 0, clmul = 1, vclmul = 2 };

// The best level of this machine.
CrcLevel crc32_best();

// Remainder of the bytes data [nbytes] as a polynomial over GF(2), modulo 0x104c11db7. Continues from `value` (0 at the
// start), as zlib's crc32 does. `level` must be at most crc32_best(). Cost: one read. Source: Gopal et al. 2009 (folding).
std::uint32_t crc32(std::uint32_t value, const unsigned char *data, std::size_t nbytes, CrcLevel level);

// target [nbytes] = source [nbytes], any bytes; returns crc32() of what was copied. The ranges must not overlap.
// Cost: one read, one write. Source: Gopal et al. 2009.
std::uint32_t copy_crc32(std::uint32_t value, unsigned char *target, const unsigned char *source, std::size_t nbytes,
                         CrcLevel level);

// Maps the pages of [data, data + nbytes) for reading, reading them from their file where needed. `data` may lie anywhere
// in a page. 0, or the errno: EFAULT where the file is shorter or the device fails (touching the page would be SIGBUS).
// EINVAL from kernels that cannot be asked (before 5.14).
int populate(const unsigned char *data, std::size_t nbytes);

// Whether the mapped file's pages at 16 places of [data, data + nbytes) are in memory; nothing is read. True where the
// kernel does not say. Cost: 16 system calls of under a microsecond.
bool resident(const unsigned char *data, std::size_t nbytes);

}  // namespace ds
