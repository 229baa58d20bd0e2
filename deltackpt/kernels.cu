// CUDA kernels: the same columns and fingerprints as kernels.py, bit for bit. Compiled at run time by NVRTC.
//
// A row is a run of elements of one tensor, or of a box of one, that lies in one group; a tile is 8,192 elements of a
// row, the last one shorter. Tables: per tile its row and its number in the row; per row its elements, the element of
// its tensor at which it begins, and an address, or the place of its box. One launch serves any number of tensors.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long s64;

constexpr int TILE = 8192;
constexpr int THREADS = 256;
constexpr int SPARSE = TILE / 4;  // most changes of a sparse tile
constexpr u16 DENSE = 0xFFFF;

template <int W> struct Element;
template <> struct Element<1> { typedef u8 type; };
template <> struct Element<2> { typedef u16 type; };
template <> struct Element<4> { typedef u32 type; };
template <> struct Element<8> { typedef u64 type; };

__device__ __forceinline__ u64 key(u64 word) {
  u64 z = word + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return (z ^ (z >> 31)) | 1;
}

// What turning `before` into `after` adds to the fingerprint; both zero-extended before the difference.
template <int W> __device__ __forceinline__ u64 change(u64 element, u64 before, u64 after) {
  if (W == 8) {
    u64 low = (after & 0xFFFFFFFFull) - (before & 0xFFFFFFFFull), high = (after >> 32) - (before >> 32);
    return low * key(2 * element) + high * key(2 * element + 1);
  }
  u64 offset = element * W;
  return ((after - before) << (8 * (offset & 3))) * key(offset >> 2);
}

// Loads and stores at any alignment; the test is the same for a whole block.
template <int W> __device__ __forceinline__ u64 load(const u8* at) {
  typedef typename Element<W>::type T;
  if ((u64)at % W == 0) return *(const T*)at;
  u64 value = 0;
  for (int i = 0; i < W; i++) value |= (u64)at[i] << (8 * i);
  return value;
}

template <int W> __device__ __forceinline__ void store(u8* at, u64 value) {
  typedef typename Element<W>::type T;
  if ((u64)at % W == 0) { *(T*)at = (T)value; return; }
  for (int i = 0; i < W; i++) at[i] = (u8)(value >> (8 * i));
}

template <typename T> __device__ __forceinline__ T warp_sum(T value) {
  for (int o = 16; o; o >>= 1) value += __shfl_xor_sync(~0u, value, o);
  return value;
}

struct Rows {
  const u32 *tile_row, *tile_index;  // per tile
  const u64 *count, *start;          // per row
};

// ---------------------------------------------------------------- extract

// Planes of one window: gap.0, gap.1, value.0 .. at strides of `room`, dense.0 .. at strides of `dense_room`.
struct Planes {
  u8 *sparse, *dense;
  u64 room, dense_room;
};

// One block a tile, of bytes two tiles: as many bytes as of halves. Tiles take their place in the planes as they come
// (cursor: sparse changes and dense elements taken); `compact` puts them in order. Waiting for the tiles before would
// leave the memory idle.
template <int W>
__device__ void extract(Rows rows, const u64* old_at, const u64* new_at, u32 first_tile, u32 tiles, u64* cursor,
                        u16* counts, u32* place, Planes planes, u64* fp, u64* changed) {
  typedef typename Element<W>::type T;
  // A warp owns an eighth of a tile and walks it in rounds of 32 vectors, so that order needs one barrier only.
  constexpr int N = W == 1 ? 2 : 1, WARPS = THREADS / 32, PER = 16 / W, ROUNDS = 2 * W;
  constexpr int FIELDS = ROUNDS < 8 ? ROUNDS : 8, BITS = 64 / FIELDS, PACKS = ROUNDS / FIELDS;
  __shared__ u16 position[N][SPARSE];
  __shared__ T flips[N][SPARSE];
  __shared__ int warp_count[N][WARPS];
  __shared__ u64 warp_fp[N][WARPS], taken[N];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u32 local = blockIdx.x * N, row[N];
  int length[N];
  const u8 *a[N], *b[N];
  u64 element[N];
  int begin = warp * (TILE / WARPS) + lane * PER;  // first element of round 0; rounds are 32 * PER apart
  uint4 x[N][ROUNDS], y[N][ROUNDS];
  #pragma unroll
  for (int q = 0; q < N; q++) {
    u32 tile = first_tile + (local + q < tiles ? local + q : tiles - 1);
    row[q] = rows.tile_row[tile];
    u64 first = (u64)rows.tile_index[tile] * TILE, left = rows.count[row[q]] - first;
    length[q] = local + q >= tiles ? 0 : left < TILE ? (int)left : TILE;
    a[q] = (const u8*)old_at[row[q]] + first * W;
    b[q] = (const u8*)new_at[row[q]] + first * W;
    element[q] = rows.start[row[q]] + first;
  }
  #pragma unroll
  for (int q = 0; q < N; q++) {
    bool aligned = ((u64)a[q] | (u64)b[q]) % 16 == 0;
    #pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
      int e = begin + r * 32 * PER;
      x[q][r] = y[q][r] = make_uint4(0, 0, 0, 0);
      if (aligned && e + PER <= length[q]) {
        x[q][r] = *(const uint4*)(a[q] + e * W);
        y[q][r] = *(const uint4*)(b[q] + e * W);
      } else {
        #pragma unroll
        for (int i = 0; i < PER; i++)
          if (e + i < length[q]) {
            ((T*)&x[q][r])[i] = (T)load<W>(a[q] + (e + i) * W);
            ((T*)&y[q][r])[i] = (T)load<W>(b[q] + (e + i) * W);
          }
      }
    }
  }
  u32 differs[N];  // a bit for each element of this lane, in order: PER * ROUNDS is 32 for every width
  constexpr u32 ROUND = W == 1 ? 0xFFFF : (1u << PER) - 1;
  constexpr u64 FIELD = ~0ull >> (64 - BITS);
  // Changes before this lane, for all rounds at once: one field of a word each.
  u64 mine[N][PACKS], upto[N][PACKS], round_total[N][PACKS];
  #pragma unroll
  for (int q = 0; q < N; q++) {
    differs[q] = 0;
    #pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
      if (W <= 2) {
        const u32 *p = (const u32*)&x[q][r], *o = (const u32*)&y[q][r];
        #pragma unroll
        for (int i = 0; i < 4; i++) {  // 4 bytes, or 2 halves, by one comparison and a gather of its bits
          u32 bits = W == 1 ? ((__vcmpne4(p[i], o[i]) & 0x01010101) * 0x01020408) >> 24 & 15 : __vcmpne2(p[i], o[i]);
          if (W == 2) bits = (bits & 1) | (bits >> 30 & 2);
          differs[q] |= bits << (r * PER + i * (4 / W));
        }
      } else {
        const T *p = (const T*)&x[q][r], *o = (const T*)&y[q][r];
        #pragma unroll
        for (int i = 0; i < PER; i++) differs[q] |= (u32)(p[i] != o[i]) << (r * PER + i);
      }
    }
    int count = 0;
    #pragma unroll
    for (int k = 0; k < PACKS; k++) {
      mine[q][k] = 0;
      #pragma unroll
      for (int f = 0; f < FIELDS; f++)
        mine[q][k] += (u64)__popc(differs[q] >> ((k * FIELDS + f) * PER) & ROUND) << (f * BITS % 64);
      upto[q][k] = mine[q][k];
      #pragma unroll
      for (int o = 1; o < 32; o <<= 1) {
        u64 up = __shfl_up_sync(~0u, upto[q][k], o);
        if (lane >= o) upto[q][k] += up;
      }
      round_total[q][k] = __shfl_sync(~0u, upto[q][k], 31);
      #pragma unroll
      for (int f = 0; f < FIELDS; f++) count += (int)(round_total[q][k] >> (f * BITS % 64) & FIELD);
    }
    if (lane == 0) warp_count[q][warp] = count;
  }
  __syncthreads();
  int done[N], any = 0;
  bool dense[N];
  #pragma unroll
  for (int q = 0; q < N; q++) {
    int at_warp = 0;
    done[q] = 0;
    #pragma unroll
    for (int k = 0; k < WARPS; k++) { if (k == warp) at_warp = done[q]; done[q] += warp_count[q][k]; }
    any += done[q];
    dense[q] = 4 * done[q] > length[q];
    if (done[q] && !dense[q]) {
      #pragma unroll
      for (int r = 0; r < ROUNDS; r++) {
        int shift = r % FIELDS * BITS % 64;
        int at = at_warp + (int)((upto[q][r / FIELDS] - mine[q][r / FIELDS]) >> shift & FIELD);
        at_warp += (int)(round_total[q][r / FIELDS] >> shift & FIELD);
        for (u32 here = differs[q] >> (r * PER) & ROUND; here; here &= here - 1)
          position[q][at++] = (u16)(begin + r * 32 * PER + __ffs(here) - 1);
      }
    }
  }
  if (any) {
    __syncthreads();
    #pragma unroll
    for (int q = 0; q < N; q++) {
      if (!done[q]) continue;
      u64 sum = 0;
      if (dense[q])
        for (int e = threadIdx.x; e < length[q]; e += THREADS)
          sum += change<W>(element[q] + e, load<W>(a[q] + e * W), load<W>(b[q] + e * W));
      else
        // The few that changed are loaded again, out of a cache, rather than picked out of registers.
        for (int i = threadIdx.x; i < done[q]; i += THREADS) {
          int e = position[q][i];
          u64 before = load<W>(a[q] + e * W), after = load<W>(b[q] + e * W);
          flips[q][i] = (T)(before ^ after);
          sum += change<W>(element[q] + e, before, after);
        }
      sum = warp_sum(sum);
      if (lane == 0) warp_fp[q][warp] = sum;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    u64 total[N], here[N], sparse = 0;
    #pragma unroll
    for (int q = 0; q < N; q++) {
      total[q] = 0;
      here[q] = done[q];
      if (done[q])
        for (int k = 0; k < WARPS; k++) total[q] += warp_fp[q][k];
      if (q && row[q] == row[0]) { total[0] += total[q]; here[0] += here[q]; here[q] = 0; }
      if (!dense[q]) sparse += done[q];
    }
    u64 at = sparse ? atomicAdd(cursor, sparse) : 0;
    #pragma unroll
    for (int q = 0; q < N; q++) {
      if (here[q]) {
        atomicAdd(fp + row[q], total[q]);
        atomicAdd(changed + row[q], here[q]);
      }
      taken[q] = dense[q] ? atomicAdd(cursor + 1, (u64)length[q]) : at;
      if (!dense[q]) at += done[q];
      if (local + q < tiles) {
        place[local + q] = (u32)taken[q];
        counts[local + q] = dense[q] ? DENSE : (u16)done[q];
      }
    }
  }
  if (!any) return;
  __syncthreads();
  #pragma unroll
  for (int q = 0; q < N; q++) {
    if (!done[q]) continue;
    u64 to = taken[q];
    if (dense[q]) {
      if (to + length[q] > planes.dense_room) continue;  // the caller sees the sums, makes room and comes again
      for (int i = threadIdx.x; i < length[q] * W; i += THREADS)
        planes.dense[i % W * planes.dense_room + to + i / W] = a[q][i] ^ b[q][i];
      continue;
    }
    if (to + done[q] > planes.room) continue;
    for (int i = threadIdx.x; i < done[q]; i += THREADS) {
      u32 gap = i ? position[q][i] - position[q][i - 1] - 1 : position[q][0];
      planes.sparse[to + i] = (u8)gap;
      planes.sparse[planes.room + to + i] = (u8)(gap >> 8);
      u64 v = flips[q][i];
      #pragma unroll
      for (int j = 0; j < W; j++) planes.sparse[(2 + j) * planes.room + to + i] = (u8)(v >> (8 * j));
    }
  }
}

#define ROWS const u32 *tile_row, const u32 *tile_index, const u64 *count, const u64 *start
#define EXTRACT(W, BLOCKS)                                                                                             \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) extract_##W(                                           \
      ROWS, const u64* old_at, const u64* new_at, u32 first_tile, u32 tiles, u64* cursor, u16* counts, u32* place,     \
      u8* sparse, u8* dense, u64 room, u64 dense_room, u64* fp, u64* changed) {                                        \
    extract<W>({tile_row, tile_index, count, start}, old_at, new_at, first_tile, tiles, cursor, counts, place,         \
               {sparse, dense, room, dense_room}, fp, changed);                                                        \
  }
EXTRACT(1, 5)
EXTRACT(2, 5)
EXTRACT(4, 3)
EXTRACT(8, 1)

// ---------------------------------------------------------------- columns

// Columns of one group in device memory: k sparse changes and d dense elements, planes at their strides. offset: per
// tile, sparse changes (low 32 bits) and dense elements before it in the group.
struct Group {
  u16* counts;
  u8 *gaps, *values, *dense;
  u64* offset;
  u64 k, d, stride, dense_stride;
  u32 first_tile, tiles, width, before;  // before: tiles of the groups before it in this launch
};

__device__ __forceinline__ const Group* find(const Group* groups, int n, u32 at) {
  int low = 0, high = n - 1;
  while (low < high) {
    int middle = (low + high + 1) >> 1;
    if (groups[middle].before <= at) low = middle; else high = middle - 1;
  }
  return groups + low;
}

// The tile of this warp in a launch over columns, one warp a tile. t: its number in its group; n: its count; first:
// element of its row at which it begins; length: its elements.
struct Changed {
  const Group* g;
  u32 t, row;
  u16 n;
  u64 first;
  int length, lane;

  // Whether there is such a tile, and something in it changed.
  __device__ __forceinline__ bool find(Rows rows, const Group* groups, u32 n_groups, u32 tiles) {
    u32 at = (u32)(((u64)blockIdx.x * THREADS + threadIdx.x) >> 5);
    lane = threadIdx.x & 31;
    if (at >= tiles) return false;
    g = ::find(groups, n_groups, at);
    t = at - g->before;
    n = g->counts[t];
    if (n == 0) return false;
    u32 tile = g->first_tile + t;
    row = rows.tile_row[tile];
    first = (u64)rows.tile_index[tile] * TILE;
    u64 left = rows.count[row] - first;
    length = left < TILE ? (int)left : TILE;
    return true;
  }
};

// One warp a tile: from where it was taken down to its place in its group. taken: as Group.offset, but counted from the
// first tile of the window.
extern "C" __global__ void __launch_bounds__(THREADS)
compact(ROWS, const Group* groups, u32 n_groups, u32 tiles, const u16* counts, const u32* place, const u64* taken,
        const u8* sparse, const u8* dense, u64 room, u64 dense_room, u32 window_tile) {
  u32 at = (u32)(((u64)blockIdx.x * THREADS + threadIdx.x) >> 5);
  int lane = threadIdx.x & 31;
  if (at >= tiles) return;
  const Group& g = *find(groups, n_groups, at);
  u32 t = at - g.before, tile = g.first_tile + t, first = g.first_tile - window_tile;
  u16 n = counts[first + t];
  u64 to = taken[first + t] - taken[first], from = place[first + t];
  if (lane == 0) {
    g.counts[t] = n;
    g.offset[t] = to;
  }
  if (n == 0) return;
  if (n == DENSE) {
    u64 left = count[tile_row[tile]] - (u64)tile_index[tile] * TILE;
    u32 length = left < TILE ? (u32)left : TILE;
    for (u32 j = 0; j < g.width; j++)
      for (u32 i = lane; i < length; i += 32)
        g.dense[j * g.dense_stride + (to >> 32) + i] = dense[j * dense_room + from + i];
    return;
  }
  to &= 0xFFFFFFFFull;
  for (u32 j = 0; j < 2 + g.width; j++)
    for (u32 i = lane; i < n; i += 32) g.gaps[j * g.stride + to + i] = sparse[j * room + from + i];
}

// ---------------------------------------------------------------- stage

// One block a group: prefix sums of its counts. bad[0]: a group whose counts are not those of its columns.
extern "C" __global__ void scan(ROWS, const Group* groups, int* bad) {
  Rows rows = {tile_row, tile_index, count, start};
  __shared__ u64 warp_total[32], carry;
  Group g = groups[blockIdx.x];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  if (threadIdx.x == 0) carry = 0;
  __syncthreads();
  for (u32 base = 0; base < g.tiles; base += blockDim.x) {
    u32 t = base + threadIdx.x;
    u64 mine = 0;
    if (t < g.tiles) {
      u16 c = g.counts[t];
      if (c == DENSE) {
        u32 tile = g.first_tile + t;
        u64 left = rows.count[rows.tile_row[tile]] - (u64)rows.tile_index[tile] * TILE;
        mine = (left < TILE ? left : TILE) << 32;
      } else {
        mine = c;
        u32 tile = g.first_tile + t;
        u64 left = rows.count[rows.tile_row[tile]] - (u64)rows.tile_index[tile] * TILE;
        if (c > (left < TILE ? left : TILE)) atomicMax(bad, (int)blockIdx.x);
      }
    }
    u64 s = mine;
    for (int o = 1; o < 32; o <<= 1) { u64 up = __shfl_up_sync(~0u, s, o); if (lane >= o) s += up; }
    if (lane == 31) warp_total[warp] = s;
    __syncthreads();
    u64 before = carry;
    for (int k = 0; k < warp; k++) before += warp_total[k];
    if (t < g.tiles) g.offset[t] = before + s - mine;
    __syncthreads();
    if (threadIdx.x == 0) for (int k = 0; k < warps; k++) carry += warp_total[k];
    __syncthreads();
  }
  if (threadIdx.x == 0 && carry != (g.k | g.d << 32)) atomicMax(bad, (int)blockIdx.x);
}

// One warp a tile: its last position, which is the largest, must be inside. bad[1]: a tile of the launch where it is
// not. Nothing is read of groups that `scan` found wrong.
extern "C" __global__ void __launch_bounds__(THREADS)
check(ROWS, const Group* groups, u32 n_groups, u32 tiles, int* bad) {
  Changed c;
  if (!c.find({tile_row, tile_index, count, start}, groups, n_groups, tiles) || c.n == DENSE) return;
  const Group& g = *c.g;
  u64 k = g.offset[c.t] & 0xFFFFFFFFull;
  if (k + c.n > g.k) return;
  u32 sum = 0;
  for (int i = c.lane; i < c.n; i += 32) sum += 1 + g.gaps[k + i] + (g.gaps[g.stride + k + i] << 8);
  sum = warp_sum(sum);
  if (c.lane == 0 && sum > (u32)c.length) atomicMax(bad + 1, (int)(g.before + c.t));
}

// ---------------------------------------------------------------- apply

// Where the elements of a tile are: side by side in memory and in their tensor.
struct Run {
  static constexpr bool writes = true;
  u8* at;     // of the first element
  u64 first;  // its element in the tensor

  template <int W> __device__ __forceinline__ bool find(u32 e, u8*& here, u64& element) const {
    here = at + (u64)e * W;
    element = first + e;
    return true;
  }
};

// Where they are by the levels of a box, each with its extent, stride in the tensor, step in memory, and from where (low)
// up to where (high) it is here. See kernels.Place.
struct Box {
  bool writes;
  u8* at;     // of the first element of the box
  u64 first;  // its element in the tensor
  u64 start;  // element of the box at which the tile begins
  const s64* levels;
  int n;

  template <int W> __device__ __forceinline__ bool find(u32 e, u8*& here, u64& element) const {
    u64 rest = start + e;
    s64 moved = 0;
    bool inside = true;
    element = first;
    for (const s64* l = levels + 5 * (n - 1); l >= levels; l -= 5) {
      u64 c;
      if ((rest | (u64)l[0]) >> 32) {
        c = rest % (u64)l[0];
        rest /= (u64)l[0];
      } else {
        c = (u32)rest % (u32)l[0];
        rest = (u32)rest / (u32)l[0];
      }
      element += c * (u64)l[1];
      moved += (s64)c * l[2];
      inside &= l[3] <= (s64)c && (s64)c < l[4];
    }
    here = at + moved * W;
    return inside;
  }
};

// Flip an element where it is; returns what that adds, or would add, to the fingerprint.
template <int W, typename P> __device__ __forceinline__ u64 flip(const P& place, u32 e, u64 x) {
  u8* at;
  u64 element;
  if (!place.template find<W>(e, at, element)) return 0;
  u64 before = load<W>(at);
  if (place.writes) store<W>(at, before ^ x);
  return change<W>(element, before, before ^ x);
}

// One warp a tile: a prefix sum of the gaps gives the positions.
template <int W, typename P>
__device__ u64 apply_tile(const Group& g, u32 t, u16 n, const P& place, int length, int lane) {
  u64 sum = 0, offset = g.offset[t];
  if (n == DENSE) {
    const u8* plane = g.dense + (offset >> 32);
    for (int e = lane; e < length; e += 32) {
      u64 x = 0;
      #pragma unroll
      for (int j = 0; j < W; j++) x |= (u64)plane[j * g.dense_stride + e] << (8 * j);
      sum += flip<W>(place, e, x);
    }
    return sum;
  }
  u64 k = offset & 0xFFFFFFFFull;
  int last = -1;
  for (int s = 0; s < n; s += 32) {
    int i = s + lane, step = 0;
    u64 x = 0;
    if (i < n) {
      step = (g.gaps[k + i] | (g.gaps[g.stride + k + i] << 8)) + 1;
      #pragma unroll
      for (int j = 0; j < W; j++) x |= (u64)g.values[j * g.stride + k + i] << (8 * j);
    }
    int p = step;
    #pragma unroll
    for (int o = 1; o < 32; o <<= 1) { int up = __shfl_up_sync(~0u, p, o); if (lane >= o) p += up; }
    if (i < n) sum += flip<W>(place, last + p, x);
    last += __shfl_sync(~0u, p, 31);
  }
  return sum;
}

template <typename P> __device__ u64 apply_tile(const Changed& c, const P& place) {
  switch (c.g->width) {
    case 1: return apply_tile<1>(*c.g, c.t, c.n, place, c.length, c.lane);
    case 2: return apply_tile<2>(*c.g, c.t, c.n, place, c.length, c.lane);
    case 4: return apply_tile<4>(*c.g, c.t, c.n, place, c.length, c.lane);
    default: return apply_tile<8>(*c.g, c.t, c.n, place, c.length, c.lane);
  }
}

// Rows that lie side by side; those at address 0 are not here, or scatter's.
extern "C" __global__ void __launch_bounds__(THREADS)
apply(ROWS, const u64* row_at, const Group* groups, u32 n_groups, u32 tiles, u64* fp) {
  Changed c;
  if (!c.find({tile_row, tile_index, count, start}, groups, n_groups, tiles)) return;
  u64 memory = row_at[c.row];
  if (memory == 0) return;
  Run place = {(u8*)memory + c.first * c.g->width, start[c.row] + c.first};
  u64 sum = warp_sum(apply_tile(c, place));
  if (c.lane == 0) atomicAdd(fp + c.row, sum);
}

// Rows that are boxes, or meet one; those at address 0 are not here, or apply's. Per row: row_start, the element of its
// box at which it begins; box_at and box_first, where that box begins in memory and in its tensor; its levels.
extern "C" __global__ void __launch_bounds__(THREADS)
scatter(ROWS, const u64* row_start, const u64* box_at, const u64* box_first, const s64* levels, u32 n_levels,
        const Group* groups, u32 n_groups, u32 tiles, u32 writes, u64* fp) {
  Changed c;
  if (!c.find({tile_row, tile_index, count, start}, groups, n_groups, tiles) || box_at[c.row] == 0) return;
  const s64* mine = levels + (u64)c.row * n_levels * 5;
  Box place = {writes != 0, (u8*)box_at[c.row], box_first[c.row], row_start[c.row] + c.first, mine, (int)n_levels};
  u64 sum = warp_sum(apply_tile(c, place));
  if (c.lane == 0) atomicAdd(fp + c.row, sum);
}

// ---------------------------------------------------------------- fingerprint

// Add the threads' sums up to that of a row.
__device__ __forceinline__ void block_sum(u64 sum, u64* total) {
  __shared__ u64 warp_total[THREADS / 32];
  sum = warp_sum(sum);
  if ((threadIdx.x & 31) == 0) warp_total[threadIdx.x >> 5] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    u64 all = 0;
    for (int k = 0; k < THREADS / 32; k++) all += warp_total[k];
    atomicAdd(total, all);
  }
}

// One block a tile of whole tensors: the sum over its words, the last one zero-padded.
extern "C" __global__ void __launch_bounds__(THREADS)
fingerprint(ROWS, const u64* row_at, const u8* row_width, u64* fp) {
  u32 tile = blockIdx.x, row = tile_row[tile];
  u64 width = row_width[row], first = (u64)tile_index[tile] * TILE, left = count[row] - first;
  u64 nbytes = (left < TILE ? left : TILE) * width;
  const u8* at = (const u8*)row_at[row] + first * width;
  u64 word = (start[row] + first) * width / 4, sum = 0;
  u32 words = (u32)(nbytes / 4);
  if ((u64)at % 16 == 0) {
    for (u32 i = threadIdx.x; i < words / 4; i += THREADS) {
      uint4 v = __ldcs((const uint4*)at + i);
      u64 w = word + 4 * (u64)i;
      sum += v.x * key(w) + v.y * key(w + 1) + v.z * key(w + 2) + v.w * key(w + 3);
    }
    for (u32 i = words / 4 * 4 + threadIdx.x; i < words; i += THREADS) sum += load<4>(at + 4 * i) * key(word + i);
  } else {
    for (u32 i = threadIdx.x; i < words; i += THREADS) sum += load<4>(at + 4 * i) * key(word + i);
  }
  if (threadIdx.x == 0) {
    u64 rest = 0;
    for (u64 i = 4 * (u64)words; i < nbytes; i++) rest |= (u64)at[i] << (8 * (i & 3));
    sum += rest * key(word + words);
  }
  block_sum(sum, fp + row);
}

template <int W> __device__ u64 box_sum(const Box& place, int length) {
  u64 sum = 0;
  for (int e = threadIdx.x; e < length; e += THREADS) {
    u8* at;
    u64 element;
    if (place.find<W>(e, at, element)) sum += change<W>(element, 0, load<W>(at));
  }
  return sum;
}

// One block a tile of boxes, each row a whole one.
extern "C" __global__ void __launch_bounds__(THREADS)
fingerprint_boxes(ROWS, const u8* row_width, const u64* box_at, const u64* box_first, const s64* levels, u32 n_levels,
                  u64* fp) {
  u32 tile = blockIdx.x, row = tile_row[tile];
  u64 first = (u64)tile_index[tile] * TILE, left = count[row] - first;
  int length = left < TILE ? (int)left : TILE;
  const s64* mine = levels + (u64)row * n_levels * 5;
  Box place = {false, (u8*)box_at[row], box_first[row], start[row] + first, mine, (int)n_levels};
  u64 sum;
  switch (row_width[row]) {
    case 1: sum = box_sum<1>(place, length); break;
    case 2: sum = box_sum<2>(place, length); break;
    case 4: sum = box_sum<4>(place, length); break;
    default: sum = box_sum<8>(place, length); break;
  }
  block_sum(sum, fp + row);
}
