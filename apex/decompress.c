/* Decompresses the frames of a batch, each into its place or its two places, in one call.
 *
 * LZ4 itself is liblz4's: the caller passes its LZ4_decompress_safe. What is here is the loop around it, which from
 * Python costs two thirds of the decompression itself (docs/performance.md). Built at installation where there is a C
 * compiler; apex/blocks.py does the same without.
 */
#include <stdint.h>
#include <string.h>

typedef int (*lz4_decompress)(const char *source, char *target, int source_bytes, int target_bytes);

/* image:   compressed frames; frame i is image[starts[i]] ... image[stops[i] - 1], checked by the caller to lie inside
 * places:  count x 2 places of frame_bytes each within target; a negative one is none
 * returns  the number of frames that were decompressed: below count, the next one is no frame
 */
int64_t apex_decompress(lz4_decompress decompress, const char *image, const int64_t *starts, const int64_t *stops,
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
        if (decompress(image + starts[i], frame, (int)(stops[i] - starts[i]), (int)frame_bytes) != frame_bytes)
            return i;
        if (second >= 0)
            memcpy(target + second * frame_bytes, frame, (size_t)frame_bytes); /* Now, while it is in the cache. */
    }
    return count;
}

#define MOST_FRAMES 255 /* of one transition */

/* One transition of the replay memory. Frames count from the first that it needs. */
struct stored {
    int64_t image;       /* where its segment's image begins in the arena */
    int64_t first_frame; /* which of the segment's frames is its first */
    int64_t num_frames;
    int64_t frame, depth;           /* newest frame of s_t, and how many of its stack are real */
    int64_t next_frame, next_depth; /* of s_{t+m} */
};

/* Decodes transitions straight from the arena into rows of stacks[2][batch][stack][frame_bytes], from first_row on.
 *
 * The writer may overwrite the arena meanwhile, so whatever is read there may say anything: it is copied before it is
 * looked at, and every length is checked. Whether it was overwritten is for the caller to find out afterwards.
 *
 * scratch: num_frames x max_frame_bytes of the largest transition
 * returns  the number of transitions that were decoded: below count, the next one's frames are none
 */
int64_t apex_decode_stored(lz4_decompress decompress, const char *arena, int64_t arena_bytes,
                           const struct stored *transitions, int64_t count, int64_t max_frame_bytes, char *scratch,
                           char *stacks, int64_t frame_bytes, int64_t stack, int64_t batch, int64_t first_row)
{
    uint32_t table[MOST_FRAMES + 1];
    for (int64_t i = 0; i < count; i++) {
        const struct stored *t = &transitions[i];
        int64_t num = t->num_frames, begins = t->image + 4 * t->first_frame;
        if (num < 1 || num > MOST_FRAMES || t->depth > stack || t->next_depth > stack || t->image < 0 ||
            t->first_frame < 0 || begins + 4 * (num + 1) > arena_bytes)
            return i;
        memcpy(table, arena + begins, (size_t)(4 * (num + 1)));
        int64_t bytes = (int64_t)table[num] - (int64_t)table[0];
        if (bytes < 0 || bytes > num * max_frame_bytes || t->image + (int64_t)table[num] > arena_bytes)
            return i;
        memcpy(scratch, arena + t->image + table[0], (size_t)bytes);

        char *sides[2] = {stacks + (first_row + i) * stack * frame_bytes,
                          stacks + (batch + first_row + i) * stack * frame_bytes};
        memset(sides[0], 0, (size_t)((stack - t->depth) * frame_bytes)); /* before the episode's first frame */
        memset(sides[1], 0, (size_t)((stack - t->next_depth) * frame_bytes));
        for (int64_t f = 0; f < num; f++) {
            int64_t start = (int64_t)table[f] - (int64_t)table[0], stop = (int64_t)table[f + 1] - (int64_t)table[0];
            int64_t age = t->frame - f, next_age = t->next_frame - f; /* counted back from the newest of the stack */
            char *first = age >= 0 && age < t->depth ? sides[0] + (stack - 1 - age) * frame_bytes : NULL;
            char *second = next_age >= 0 && next_age < t->next_depth ? sides[1] + (stack - 1 - next_age) * frame_bytes : NULL;
            char *place = first ? first : second;
            if (!place)
                continue;
            if (start < 0 || start > stop || stop > bytes ||
                decompress(scratch + start, place, (int)(stop - start), (int)frame_bytes) != frame_bytes)
                return i;
            if (first && second)
                memcpy(second, first, (size_t)frame_bytes);
        }
    }
    return count;
}
