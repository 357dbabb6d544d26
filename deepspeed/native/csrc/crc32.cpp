// The checksum of zip archives and of zlib (CRC-32, polynomial 0xEDB88320), by carry-less multiplication where the CPU
// has it: 64 bytes are folded at a time. Source: Gopal et al., "Fast CRC Computation for Generic Polynomials Using
// PCLMULQDQ Instruction", Intel 2009; constants for the reflected polynomial as printed there.
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define DS_X86 1
#endif
#if defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define DS_ARM 1
#endif

namespace {

// Eight tables of 256: a byte, and the same byte with 1 to 7 zero bytes behind it.
struct Tables {
  uint32_t row[8][256];
  Tables() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t value = byte;
      for (int bit = 0; bit < 8; ++bit) value = value & 1 ? (value >> 1) ^ 0xEDB88320u : value >> 1;
      row[0][byte] = value;
    }
    for (int zeros = 1; zeros < 8; ++zeros)
      for (int byte = 0; byte < 256; ++byte)
        row[zeros][byte] = (row[zeros - 1][byte] >> 8) ^ row[0][row[zeros - 1][byte] & 255];
  }
};

const Tables tables;

uint32_t by_table(uint32_t crc, const unsigned char *data, size_t nbytes) {
  const auto &t = tables.row;
  for (; nbytes >= 8; data += 8, nbytes -= 8) {
    uint32_t low, high;
    std::memcpy(&low, data, 4);
    std::memcpy(&high, data + 4, 4);
    low ^= crc;
    crc = t[7][low & 255] ^ t[6][low >> 8 & 255] ^ t[5][low >> 16 & 255] ^ t[4][low >> 24] ^ t[3][high & 255] ^
          t[2][high >> 8 & 255] ^ t[1][high >> 16 & 255] ^ t[0][high >> 24];
  }
  for (; nbytes; ++data, --nbytes) crc = (crc >> 8) ^ t[0][(crc ^ *data) & 255];
  return crc;
}

#ifdef DS_X86

#define DS_FOLDS __attribute__((target("pclmul,sse4.1")))

DS_FOLDS __m128i load(const unsigned char *data) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(data)); }

// `value` times the two powers of x in `by`, plus what follows.
DS_FOLDS __m128i fold(__m128i value, __m128i by, __m128i next) {
  __m128i low = _mm_clmulepi64_si128(value, by, 0x00), high = _mm_clmulepi64_si128(value, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// nbytes: a multiple of 16, at least 64.
DS_FOLDS uint32_t by_folding(uint32_t crc, const unsigned char *data, size_t nbytes) {
  const __m128i by512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
  __m128i lane[4];
  for (int i = 0; i < 4; ++i) lane[i] = load(data + 16 * i);
  lane[0] = _mm_xor_si128(lane[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  for (data += 64, nbytes -= 64; nbytes >= 64; data += 64, nbytes -= 64)
    for (int i = 0; i < 4; ++i) lane[i] = fold(lane[i], by512, load(data + 16 * i));
  __m128i rest = lane[0];
  for (int i = 1; i < 4; ++i) rest = fold(rest, by128, lane[i]);
  for (; nbytes >= 16; data += 16, nbytes -= 16) rest = fold(rest, by128, load(data));
  // 128 bits to 64, then the remainder by Barrett's method.
  const __m128i low32 = _mm_setr_epi32(-1, 0, -1, 0);
  rest = _mm_xor_si128(_mm_srli_si128(rest, 8), _mm_clmulepi64_si128(rest, by128, 0x10));
  __m128i upper = _mm_srli_si128(rest, 4);
  rest = _mm_clmulepi64_si128(_mm_and_si128(rest, low32), _mm_cvtsi64_si128(0x163cd6124), 0x00);
  rest = _mm_xor_si128(rest, upper);
  const __m128i barrett = _mm_set_epi64x(0x1f7011641, 0x1db710641);
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(rest, low32), barrett, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low32), barrett, 0x00);
  return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(rest, quotient), 1));
}

bool folds() {
  static const bool found = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  return found;
}

#endif

}  // namespace

// The checksum of what had the checksum `value`, followed by `data`.
extern "C" __attribute__((visibility("default"))) uint32_t ds_crc32(uint32_t value, const unsigned char *data,
                                                                    size_t nbytes) {
  uint32_t crc = ~value;
#ifdef DS_X86
  if (nbytes >= 64 && folds()) {
    size_t whole = nbytes / 16 * 16;
    crc = by_folding(crc, data, whole);
    data += whole;
    nbytes -= whole;
  }
#endif
#ifdef DS_ARM
  for (; nbytes >= 8; data += 8, nbytes -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    crc = __crc32d(crc, word);
  }
#endif
  return ~by_table(crc, data, nbytes);
}
