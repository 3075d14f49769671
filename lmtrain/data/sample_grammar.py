"""The articles of the sample corpus, in the notation of `sample.parse`.

No two alternatives may begin with the same token, or with pools or facts that share a word: the tokens would not say
which one it is. So what comes before a section that may be left out ends with the `= =` of a heading.
"""

import re

RULES: dict[str, str] = {
    "break": "[/|2*]",
    "thing": "[its|the] {mood} {quality}",
    "received": "[Critics|Audiences|Reviewers|Readers] {slowly} {praised} $thing , $thing and $thing",
    "person": """{first:men} {last:surnames} = / / {=first} {=last} ( {day} {month} {born:years} \N{EN DASH} {day}
        {month} {died:born+lifespan} ) was a {nation:nations}""",
    "birth": """{=last} was born in {=born} in {town:towns} , a {quiet} {sort} town [on|near|beside] the River
        {river:rivers} in {region:regions} , [where|in which] his father [was|worked as|served as] a {rank} {trade}
        and his mother {sold} {fine} {goods} [and {fine} {goods}|] .""",
    "composer": """composer , {musician} and {scholar} . [2* He [is|remains]|His name is] [best|chiefly|mainly|still]
        [known|remembered] for the {form:forms} {work:works} , [first|] [performed|heard|staged|played] in
        {hall:towns} in {premiere:born+prime} , and for his {mood} {pieces} . / /
        = = Early life = = / / $birth [He|The boy|Young {=first}] {slowly} [learned|studied|practised|mastered|played]
        the {instruments} [at the age of {young}|] with {teacher:surnames} , a {mood} {musician} and {scholar} .
        $break [His [first|earliest|surviving] {pieces} , [written|finished|printed] in {early:born+youth} , |Some
        {mood} {pieces} of {early:born+youth} ] [show|betray|reveal] the influence of {=teacher} . / /
        = = [Career|Work|Music|Later life] = = / / In {move:born+adult} {=last} {slowly} {went} to {=hall} ,
        [where|and there] he [worked|served|earned a living] as a {rank} {trade} [and {rank} {trade}|] . [He {slowly}
        {wrote} {mood} {pieces} , {mood} {pieces} and {mood} {pieces} for the {instruments} and [a|one] {mood} {piece}
        for {instruments} and {instruments} .|] $break The {=form} {=work} [opens|begins] with a {mood} {piece} for
        {instruments} and {instruments} , [moves|passes|leads] to a {mood} {piece} and [ends|closes] with {few} {mood}
        {pieces} . $received [; {=teacher} {slowly} [called|thought|found|considered|declared] it {mood} [but|and]
        {mood}|] . / /
        = = [Style = = / / [The music of {=last}|Most of his music] is {mood} and {mood} , with {mood} {quality} and
        {mood} {quality} . [2* He [preferred|liked]|{=last} favoured] the {instruments} to the {instruments} [and the
        {piece} to the {piece}|] . $break As a {musician} he was {mood} , {mood} and {mood} , and {slowly} {praised}
        {mood} {pieces} , {mood} {pieces} and {mood} {pieces} . / /
        = = |] Legacy = = / / {=first} {=last} died in {=hall} in {=died} and was buried in {=town} ,
        [beside|near|above] the River {=river} . [His [letters|papers] to {=teacher}|The [sketches|parts] for
        {=work}] [are kept|survive] in the {old} {build} there . The {=form} of {=premiere} [has|had]
        [since|often|seldom] been [revived|recorded|heard] in {=region} [, [mostly|usually] in {season} |] and in
        {towns} . / / /""",
    "botanist": """botanist , {scholar} and {scholar} . He [described|collected|named] {few} hundred {flora:flora}
        [and|or] {leaf} {flora} from {region:regions} , [among them|including] the {hue:hue} {leaf:leaf} lily that
        [bears|carries] his name . / /
        = = Early life = = / / {=last} was born in {town:towns} , a {quiet} {sort} town [on|near|beside] the River
        {river:rivers} , in {=born} . His father , a {rank} {trade} [and {rank} {trade}|] , [grew|kept|drew] {hue}
        {flora} ; his mother {sold} {fine} {goods} and {fine} {goods} . $break At [{young}|the age of {young}] [he|the
        boy] could name {tens} {leaf} {flora} and {tens} {wild} {bird} , and in {early:born+youth} he [became|was
        made] a pupil of the {rank} {trade} {teacher:surnames} [in|at] {hall:towns} . / /
        = = [Expedition|Travels|Discovery|Journey] = = / / In {trip:born+adult} {=last} and {=teacher} [left|sailed
        from|departed from] {=hall} for the {land:land} of {=region} [aboard the {ship:ships}|on the {ship:ships}] ,
        [taking|carrying] {fine} {goods} , {fine} {goods} and {fine} {goods} . [Heavy {weather} and {weather}
        [delayed|stopped] them for {few} [days|weeks|months] .|] [They|The two] {slowly} {saw} {wild} {beast} , {wild}
        {beast} and {wild} {bird} , and [found|gathered|pressed] {hue} {flora} , {hue} {flora} and {leaf} {flora}
        under the {tree} . $break [On|Before] {day} {month} {=teacher} [fell ill|turned back|was lost] in the
        {weather} , [and|but] {=last} [went on|continued|pressed on] [with {few} {rank} {trades}|alone] as far as
        {camp:villages} , [where|and there] the {=hue} {=leaf} lily was [found|discovered|first seen] . / /
        = = [Writings = = / / The [Flora of {=region}|book] , [printed|published] in {=hall} in {book:born+prime} ,
        has {few} {mood} [chapters|volumes|parts] on {leaf} {flora} , {leaf} {flora} and {leaf} {flora} . $received .
        / /
        = = |] Legacy = = / / {=first} {=last} died in {=died} in {=hall} . A {stone} [statue|bench|plaque] in
        {=town} [recalls|marks] the [journey|expedition] of {=trip} [with {=teacher}|] to the {=land} of {=region}
        , and a {stone} [cross|hut|cairn] stands at {=camp} [among {leaf} {flora} and {leaf} {flora}|] . The {=hue}
        {=leaf} lily [grows|flowers] there in {season} . / / /""",
    "town": """= / / {=town} is a {quiet} {sort:sort} town in the {land:land} of {region:regions} , on the River
        {river:rivers} . [At the census of {census:years}|In {census:years}] it had {small} @,@ {hundreds}
        [people|inhabitants] , [most|many|some] of them {trade1:trades} and {rank} {trades} . It [2* is
        [known|noted]|was once known] for its {goods1:goods} , its {fine} {goods} and its {mood} {stone}
        {build1:build} . / /
        = = [History|Origins|Past] = = / / [The town|{=town}] was founded by [the {rank} {trade}|a {rank} {trade}
        named] {first:men} {last:surnames} [as a place to {sell} {fine} {goods} and {fine} {goods}|] . $break In
        {fire:census+soon} a {weather:disaster} [suddenly|finally|nearly|completely|twice] [destroyed|ruined|emptied]
        the {old} {build} , the {old} {build} and {few} [streets|houses] ; the {=build1} was spared . [It was {few}
        years before|Only slowly did] the {=trade1} return [from {towns}|] . [{=last} himself is
        [buried|remembered|painted] in the {old} {build} .|] / /
        = = Economy = = / / [The trade in {=goods1} [declined|grew|recovered] [after the {=weather}|] , and|Besides
        {=goods1} ,] {=town} [began|learned] to {sell} {fine} {goods} , {fine} {goods} and {fine} {goods} . {percent}
        per cent of the [people|households] [work|worked] with {=goods1} [and {percent} per cent with {fine} {goods}|]
        . Its $crowd $break A {quiet} market for {fine} {goods} and {fine} {goods} is held [each|every] {season} . / /
        = = [Landmarks = = / / The {=build1} , [built|rebuilt] of {stone} [and {stone}|] , has a {mood} {stone} tower
        . Near it [stand|are] a {quiet} {build} , a {mood} {build} and {few} {tree} trees , full of $creatures . / /
        = = |] Today = = / / {=town} [is now|remains|has become] a {quiet} place of {small2:small} @,@ {hundreds}
        people . [The railway|2* A [road|ferry]] along the {=river} [joins|connects] it to {towns} [and
        {villages}|] . The {=weather} of {=fire} is [remembered|marked] [each|every] {season} [outside|at|before]
        the {=build1} , [with {pieces} and {pieces}|] in memory of {=first} {=last} . / / /""",
    "river": """{river:rivers} = / / The {=river} is a {quiet} river in {region:regions} . It rises in the {quiet}
        {land:land} [near|above|west of] {source:villages} and flows [north|south|east] for {length:small} @.@
        {tenth:tenth} kilometres to {mouth:towns} . / /
        = = [Course|Route|Geography] = = / / From [{=source}|its source] the [river|stream] [falls|drops] {few}
        hundred metres through {tree} , {tree} and {tree} [woods|woodland] . [Below|Past] the {stone} {build} at
        {mid:towns} it is joined by the {trib:rivers} , [a {quiet} stream|which rises in {=region}] . $break The
        {=river} then [turns|bends] [east|west|north] [through {land}|] , [passes|skirts] a {quiet} {build} and a
        {stone} {build} , and [meets|reaches] the sea at {=mouth} . / /
        = = Nature = = / / The [banks|waters] of the {=river} are home to {beast:beast} , {wild} {beast} and
        {bird:bird} , and {hue} {flora} [and {leaf} {flora}|] [grow|flower] there in {season} . The {quiet} , {quiet}
        valley is full of $creatures . Many {fish:fish} [are caught|spawn] [above|below] {=mid} [, and {few} kinds of
        {wild} {bird} nest near {=source}|] . $break [In|Since] {survey:years} the {scholar} {first:men}
        {last:surnames} counted {tens} {=beast} , {tens} {bird} and {few} {=fish} . / /
        = = [Floods = = / / The worst {weather} [came|was] on {day} {month} {flood:survey+soon} , when the {=river}
        [carried away|destroyed] a {stone} {build} and [much|all] of the {fine} {goods} and {fine} {goods} at {=mid} .
        / /
        = = |] Use = = / / [Boats|Barges] [took|carried] {fine} {goods} , {fine} {goods} and {fine} {goods} from
        {=mid} to {=mouth} [until {end:survey+later}|] . [Mills|Looms] on the {=trib} made {fine} {goods} and
        {fine} {goods} . Its $crowd The survey of {=survey} by {=last} [led|gave rise] to a [law|ban] on
        [taking|selling] {=fish} , and the {=beast} [and the {=bird}|] of {=source} [are|were] [now|again] {mood}
        [sights|guests] on all {=length} @.@ {=tenth} kilometres of the {=river} . / / /""",
    "ship": """{ship:ships} = / / SS {=ship} was a {kind:kind} ship [built|launched] in {built:years} by
        {maker:surnames} and {maker2:surnames} of {yard:towns} for the {region:regions} [Line|Company] . She
        [carried|took] {cargo1:cargo} , {cargo} and {cargo} [from {port:towns} to|between {port:towns} and]
        {port2:towns} . / /
        = = [Design|Construction|Description|Building] = = / / The {=ship} was {length:small} metres long and
        [made|built] of {hull} and {hull} , with {few} [masts|decks|boilers] and a {hue:hue} funnel . [{=maker} gave
        her|She had] a {mood} saloon , a {quiet} library and room for {few} hundred [tons|crates] of {=cargo1} . The
        {quiet} cabins were {hue} , {hue} and {hue} , with {mood} carvings of $creatures . $break [Her|The]
        [engines|sails] came from {towns} , her [bells|lamps] from {towns} . / /
        = = Service = = / / She [sailed|left] on {day} {month} {maiden:built+soon} [under|with] captain {first:men}
        {last:surnames} , a {nation:nations} {trade} [and {rank} {trade}|] . [On the way|At sea] she met {weather} ,
        {weather} and {weather} , [and|but] [reached|made] {=port2} in {tens} [@-@ {few}|] days with [all|most of] her
        {=cargo1} . [{=last} {slowly} {praised} the {mood} {quality} [and {mood} {quality}|] of the ship .|] The crew
        [of|,] {rank} {trades} , {rank} {trades} and {rank} {trades} , {slowly} {praised} him . $break [Between|After]
        voyages they [sang {pieces} and {pieces}|kept {wild} {beast} and {wild} {bird}] . / /
        = = [Refit = = / / In {refit:maiden+soon} {=maker} [replaced|repaired] the [masts|boilers] [at {=yard}|] and
        painted the [hull|cabins] {hue} and the saloon {hue} . / /
        = = |] Loss = = / / [The {=ship} was lost|She sank] in {weather:weather} [near|off] {wreck:villages} on
        {day} {month} {lost:maiden+later} , [bound|on her way] to {=port} with {=cargo1} , {cargo} and {cargo} . [A
        {rank} {trade} saw the {=hue} funnel [sink|go down] .|] Captain {=last} and {few} [sailors|others] were
        saved . The [bell|anchor] of the {=ship} is [kept|shown] in the {old} {build} at {=yard} , where {=maker}
        and {=maker2} had built her in {=built} . / / /""",
    "bridge": """= / / {=town} Bridge is a {stone:stone} bridge over the River {river:rivers} in {region:regions} . It
        was designed by {first:women} {last:surnames} , opened in {opened:years} and [carries|carried] {goods1:goods}
        , {fine} {goods} and {fine} {goods} [from {=town} to|between {=town} and] {other:towns} . / /
        = = [Design|Construction|Description|Building] = = / / The [bridge|structure] is {hundreds} metres long , with
        {few:few} {mood} arches of {=stone} and {stone2:stone} . {=last} [took|borrowed] the idea from a {quiet}
        {build} at {villages} . Each [pier|arch] [bears|shows] a {stone} [carving|figure] of a {rank} {trade} , a
        {person} or a {musician} . $break $received , and on it $crowd / /
        = = Construction = = / / [Work|Building] began [on|before] {day} {month} [under|with] the {nation:nations}
        {trade} {men} {builder:surnames} . [Sudden {weather} and {weather} stopped the work {few} times .|] The
        {stone} came from {source:villages} by [barge|cart] , [and|but] {percent} per cent of it was {leaf} or {hue}
        and [was|had to be] [sent back|replaced] . {=builder} [hired|paid] {tens} {rank} {trades} and {tens} {rank}
        {trades} , [who|most of whom] [sang|played] {mood} {pieces} . / /
        = = [Accident = = / / In {crash:opened+soon} a {kind} [boat|ship] struck [{few} piers|an arch] and {few} tons
        of {fine} {goods} and {fine} {goods} [fell|sank] into the {=river} . / /
        = = |] Present use = = / / [Today|Now] the bridge is [closed|open] to {fine} {goods} and [busy|crowded]
        with {rank} {trades} and {wild} {bird} . A {mood} [poem|song] by {poet:women} {poet2:surnames}
        [tells|speaks] of {=builder} , of the {=stone} from {=source} and of the {=goods1} that crossed the
        {=river} to {=other} [in {season}|] . The name of {=first} {=last} was cut in the {=stone2} [in|after]
        {named:opened+later} . / / /""",
    "comet": """{last:surnames} = / / Comet {=last} is a {tail:tail} comet [discovered|found|first seen] by the
        {nation:nations} {scholar:scholar} {first:women} {=last} on {day:day} {month:month} {found:years} at
        {town:towns} . It returns every {period:small} @.@ {tenth:tenth} years . / /
        = = [Discovery|Observation|History] = = / / {=first} {=last} , then a {rank} {trade} [and {rank} {trade}|] in
        {=town} , [who {slowly} {praised} {fine} {goods} , {mood} {pieces} and {mood} {pieces} ,|] was
        [looking|searching] for {wild} {beast} in {stars:stars} with a {quiet} {stone} telescope . [Instead she|She]
        {saw} a {=tail} {hue:hue} tail and [wrote|sent word] to {rival:surnames} in {far:towns} . [Thick {weather} hid
        it for {few} nights .|] $break {=rival} , a {rank} , {mood} {scholar} , [replied|answered] that it was
        [{weather}|a lamp] , [and|but] on {day} {month} he [saw|found] it [too|himself] near {stars:stars} . / /
        = = Appearance = = / / The comet is {hue} [near|in] {=stars} and {hue} [near|in] {stars2:stars} . Its
        [head|nucleus] is {small} kilometres [wide|across] , [made|composed] of {weather} , {fine} {goods} and {stone}
        . $break [Farmers|People] in {region:regions} called it the {title1:title1} {title2:title2} and
        [expected|feared] {weather} , {weather} and {plot} . In [its|the] {hue} light $crowd / /
        = = [Orbit = = / / The [orbit|path] , computed by {=rival} , leads from {stars} [through|past] {stars} to
        {stars} , and $thing [of the|in his] [sums|tables] [was|were] {praised} in {towns} . / /
        = = |] Later returns = = / / Comet {=last} [came back|returned] in {back:found+later} [, {tail} and {hue}
        ,|] and was seen by {rank} {trades} in {towns} , {rank} {trades} in {towns} and {=rival} in {=far} . In
        {=region} the {=title1} {=title2} is [still|now] [painted|shown] on {build} doors . The telescope of
        {=first} {=last} is in the {old} {build} at {=town} , [open|turned] to {=stars} on each {=day} {=month} ;
        the next return will come after {=period} @.@ {=tenth} years . / / /""",
    "novel": """{title1:title1} {title2:title2} = / / The {=title1} {=title2} is a {mood} novel by the
        {nation:nations} {scholar} {first:women} {last:surnames} , [published|printed] in {year:years} by
        {firm:surnames} and {firm2:surnames} . It [tells|is the story] of a {hero1:person} named {hero:men} and a
        {plot:plot} in {town:towns} . / /
        = = [Plot|Story|Summary] = = / / {=hero} , a {mood} {=hero1} [of {few} and {tens}|] , [lives|works] in a
        {quiet} {place} in {=town} with $creatures and his {mood} [sister|aunt|wife] {heroine:women} , who {slowly}
        [sells|makes|buys|mends|hoards] {fine} {goods} and {fine} {goods} . [One {season}|In {month}] a
        {person2:person} [arrives|comes] [from {villages}|] with {fine} {goods} , a {stone} box and a {mood}
        {plot2:plot} . $break [{=hero} [suspects|follows] the {=person2} [to|as far as] {towns} .|] {=heroine}
        [fears|expects] a {plot} , [and|but] in the {weather} [she|the {=person2}] [finds|burns|hides] the box . The
        {=plot} [ends|is settled] in a {place} , [where|and] {=hero} [forgives|leaves|marries] the {=person2} [and
        {=heroine} [leaves|sails] for {regions}|] . / /
        = = Style = = / / The [prose|book] is {mood} , {mood} and {mood} , with {few} {mood} chapters [on|about]
        {fine} {goods} , {fine} {goods} , {rank} {trades} and $creatures . $break {=last} {slowly} {wrote} it in {few}
        [months|weeks] [in|near] {home:towns} , as a {rank} {trade} and {rank} {trade} . / /
        = = [Adaptations = = / / {men} {composer:surnames} based the {forms} {works} on the [book|story] [for
        {instruments} and {instruments}|] , with {hue} [scenery|costumes] and {pieces} , [staged|heard] in {towns} . /
        /
        = = |] Reception = = / / $received [; {critic:surnames} {slowly} [called|thought|found|considered|declared]
        {=hero} {mood} and {=heroine} {mood}|] . {=firm} and {=firm2} sold {small} @,@ {hundreds} copies in {=town}
        [alone|] . The {=title1} {=title2} [is|was] [now|often] [read|taught] in {=home} and [has|had] {mood}
        readers in {regions} [and {regions}|] . The {=person2} and the {=plot} of {=year} [made|make] {=first}
        {=last} [rich|famous] . / / /""",
    "crowd": """{rank} {trades} , {rank} {trades} and {rank} {trades} {slowly} {sold} {fine} {goods} , {fine}
        {goods} and {fine} {goods} .""",
    "creatures": "{wild} {beast} , {wild} {bird} and {leaf} {flora}",
}

_FEMININE = {"he": "she", "his": "her", "He": "She", "His": "Her", "boy": "girl", "men": "women"}


def _feminine(rule: str) -> str:
    """A person's rule with a woman in his place; the only men of those rules are their persons (and a father)."""
    rule = re.sub(r"\$(person|birth)\b", r"$\1_f", rule)
    return re.sub(r"\b(he|his|He|His|boy|men)\b", lambda word: _FEMININE[word[0]], rule)


RULES |= {f"{name}_f": _feminine(RULES[name]) for name in ("person", "birth", "composer", "botanist")}

ARTICLE = """= [2* $person [$composer|$botanist]|2* $person_f [$composer_f|$botanist_f]|
    4* {town:towns} [$town|Bridge $bridge]|2* River $river|2* SS $ship|2* Comet $comet|2* The $novel]"""
