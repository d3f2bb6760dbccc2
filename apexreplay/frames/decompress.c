/* Decompresses the frames of a batch in one call: from a received blob, or directly from the replay memory.
 *
 * The caller passes the function LZ4_decompress_safe of liblz4. This file contains only the loop around it. In Python,
 * the loop takes two thirds of the time of the decompression (docs/performance.md). The installation builds this file
 * if there is a C compiler; lz4_blocks.py has the same loop in Python.
 */
#include <stdint.h>
#include <string.h>

typedef int (*lz4_decompress)(const char *source, char *target, int source_bytes, int target_bytes);

/* Decompresses frames of one size into the rows of an array.
 *
 * blob:    compressed frames; frame i is blob[starts[i]] ... blob[stops[i] - 1]. The caller checks these positions.
 * places:  up to two rows of `target` for each frame, of frame_bytes bytes each; a negative number stands for no row.
 * Returns the number of frames before the first that does not decompress.
 */
int64_t apex_decompress(lz4_decompress decompress, const char *blob, const int64_t *starts, const int64_t *stops,
                        const int64_t (*places)[2], int64_t count, char *target, int64_t frame_bytes)
{
    for (int64_t i = 0; i < count; i++) {
        int64_t first = places[i][0], second = places[i][1];
        if (first < 0) {
            first = second;
            second = -1;
        }
        if (first < 0)
            continue;
        char *frame = target + first * frame_bytes;
        if (decompress(blob + starts[i], frame, (int)(stops[i] - starts[i]), (int)frame_bytes) != frame_bytes)
            return i;
        if (second >= 0)
            memcpy(target + second * frame_bytes, frame, (size_t)frame_bytes); /* while the frame is cached */
    }
    return count;
}

#define MOST_FRAMES 255 /* maximum frames of one transition */

/* The place of one transition's frames in the arena, or in a received blob (0). Frame numbers count from the first frame of the transition. */
struct located {
    int64_t row;         /* row of the stacks to write to */
    int64_t blob;        /* position of the segment's blob in the arena, in bytes */
    int64_t first_frame; /* number of the transition's first frame in the segment */
    int64_t num_frames;
    int64_t frame, depth;           /* newest frame of s_t; number of real frames in its stack */
    int64_t next_frame, next_depth; /* the same for s_{t+m} */
};

struct memory {
    const char *arena;
    int64_t arena_bytes;
    int64_t max_frame_bytes; /* maximum size of a compressed frame */
    char *scratch;           /* most frames of a transition x max_frame_bytes; NULL: no other process writes to the arena */
};

struct stacks {
    char *rows; /* [2][batch][stack][frame_bytes] */
    int64_t batch, stack, frame_bytes;
};

/* Returns whether `value` is in 0 ... `most`. */
static int within(int64_t value, int64_t most) { return value >= 0 && value <= most; }

/* Decodes one transition; returns whether it could be decoded. If not, the content of its row is undefined. */
static int decode_one(lz4_decompress decompress, const struct memory *memory, const struct located *t,
                      const struct stacks *stacks)
{
    uint32_t table[MOST_FRAMES + 1];
    int64_t num = t->num_frames, size = stacks->frame_bytes, stack = stacks->stack, end = memory->arena_bytes;
    if (num < 1 || num > MOST_FRAMES || !within(t->depth, stack) || !within(t->next_depth, stack) ||
        !within(t->row, stacks->batch - 1) || !within(t->blob, end) || !within(t->first_frame, end))
        return 0;
    int64_t begins = t->blob + 4 * t->first_frame;
    if (begins + 4 * (num + 1) > end)
        return 0;
    memcpy(table, memory->arena + begins, (size_t)(4 * (num + 1)));
    int64_t first_byte = table[0], bytes = (int64_t)table[num] - first_byte;
    if (!within(bytes, num * memory->max_frame_bytes) || t->blob + first_byte + bytes > end)
        return 0;
    const char *frames = memory->arena + t->blob + first_byte;
    if (memory->scratch)
        frames = memcpy(memory->scratch, frames, (size_t)bytes);

    char *now = stacks->rows + t->row * stack * size, *later = now + stacks->batch * stack * size;
    memset(now, 0, (size_t)((stack - t->depth) * size)); /* frames before the start of the episode are zero */
    memset(later, 0, (size_t)((stack - t->next_depth) * size));
    for (int64_t f = 0; f < num; f++) {
        int64_t start = (int64_t)table[f] - first_byte, stop = (int64_t)table[f + 1] - first_byte;
        int64_t age = t->frame - f, next_age = t->next_frame - f; /* frames before the newest frame of the stack */
        char *first = age >= 0 && age < t->depth ? now + (stack - 1 - age) * size : NULL;
        char *second = next_age >= 0 && next_age < t->next_depth ? later + (stack - 1 - next_age) * size : NULL;
        char *place = first ? first : second;
        if (!place)
            continue;
        if (start < 0 || start > stop || stop > bytes ||
            decompress(frames + start, place, (int)(stop - start), (int)size) != size)
            return 0;
        if (first && second)
            memcpy(second, first, (size_t)size);
    }
    return 1;
}

/* Decodes transitions from the arena into rows of stacks; good[i] is 1 if transition i could be decoded, else 0.
 *
 * The writer may overwrite the arena at the same time. Therefore the data is copied first, and then checked. The caller
 * finds out afterwards whether the data was overwritten. A received blob is an arena that nobody overwrites: its frames
 * are not copied. Nothing outside of the arena is read, whatever arena and transitions contain.
 */
void apex_decode_stored(lz4_decompress decompress, const struct memory *memory, const struct located *transitions,
                        int64_t count, const struct stacks *stacks, uint8_t *good)
{
    for (int64_t i = 0; i < count; i++)
        good[i] = (uint8_t)decode_one(decompress, memory, &transitions[i], stacks);
}

/* Version of the functions' arguments. lz4_blocks.py uses only this version, so it never calls an outdated build. */
const int64_t apex_interface = 3;

/* SHA-256 of this file, set by setup.py. native.py compares it. */
#ifndef APEX_SOURCE
#define APEX_SOURCE ""
#endif
const char apex_source[65] = APEX_SOURCE;
