// Shuffles by a byte of bitmap, for instruction sets that cannot compress by a mask.
#ifndef BITTRAIN_TABLES_H_
#define BITTRAIN_TABLES_H_

#include <cstdint>

namespace bittrain {

// For words of `Size` bytes, `Lanes` of them in a vector: by a mask of `Lanes` bits, the byte
// positions that move the marked lanes together, or apart. Positions of 0x80 give zero, on x86
// and NEON alike.
template <int Size, int Lanes>
struct Shuffles {
  alignas(64) uint8_t compress[1 << Lanes][Size * Lanes];
  alignas(64) uint8_t expand[1 << Lanes][Size * Lanes];

  constexpr Shuffles() : compress(), expand() {
    for (int mask = 0; mask < 1 << Lanes; ++mask) {
      int marked = 0;
      for (int lane = 0; lane < Lanes; ++lane) {
        const bool is_marked = mask >> lane & 1;
        for (int byte = 0; byte < Size; ++byte) {
          expand[mask][lane * Size + byte] =
              static_cast<uint8_t>(is_marked ? marked * Size + byte : 0x80);
          if (is_marked) {
            compress[mask][marked * Size + byte] = static_cast<uint8_t>(lane * Size + byte);
          }
        }
        marked += is_marked;
      }
      for (int byte = marked * Size; byte < Size * Lanes; ++byte) compress[mask][byte] = 0x80;
    }
  }
};

inline constexpr Shuffles<2, 8> kShuffles2;
inline constexpr Shuffles<4, 4> kShuffles4;

// The same in positions of whole lanes, for eight of 4 bytes.
struct LaneShuffles {
  alignas(64) uint8_t compress[256][8];
  alignas(64) uint8_t expand[256][8];

  constexpr LaneShuffles() : compress(), expand() {
    for (int mask = 0; mask < 256; ++mask) {
      int marked = 0;
      for (int lane = 0; lane < 8; ++lane) {
        expand[mask][lane] = static_cast<uint8_t>(marked);
        if (mask >> lane & 1) compress[mask][marked++] = static_cast<uint8_t>(lane);
      }
    }
  }
};

inline constexpr LaneShuffles kLaneShuffles;

}  // namespace bittrain

#endif  // BITTRAIN_TABLES_H_
